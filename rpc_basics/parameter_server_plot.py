"""What parameter_server.py has found: a row for each run, and a picture of all of them."""

from pathlib import Path
from statistics import mean

COLUMNS = f"{'mode':8}{'pull':>5}{'compress':>10}{'seed':>5}{'updates':>8}{'accuracy':>10}"
COLUMNS += f"{'staleness':>10}{'most':>5}{'refused':>8}{'KB/push':>9}{'seconds':>8}"


def print_head() -> None:
    print(COLUMNS, flush=True)


def print_row(run: dict) -> None:
    settings, stalenesses = run["settings"], run["stalenesses"]
    print(
        f"{settings.mode:8}{settings.pull_every:5}{settings.compress:>10}{settings.seed:5}"
        f"{run['version']:8}{run['accuracy']:10.3f}"
        f"{mean_of(stalenesses):10.1f}{max(stalenesses, default=0):5}{run['refused']:8}"
        f"{run['bytes'] / 1e3:9.1f}{run['seconds']:8.1f}",
        flush=True,
    )


def print_means(runs: list[dict]) -> None:
    """Over the seeds, where there are several."""
    print("\naccuracy, the mean over the seeds and its range")
    for name, of_name in grouped(runs).items():
        accuracies = [run["accuracy"] for run in of_name]
        print(
            f"  {name:32}{mean(accuracies):.3f}   {min(accuracies):.3f} to {max(accuracies):.3f}",
            flush=True,
        )


def mean_of(stalenesses: dict[int, int]) -> float:
    """stalenesses: how often each one was seen."""
    return sum(s * n for s, n in stalenesses.items()) / max(1, sum(stalenesses.values()))


def grouped(runs: list[dict]) -> dict[str, list[dict]]:
    """The runs that differ in nothing but the seed."""
    groups = {}
    for run in runs:
        settings = run["settings"]
        name = f"{settings.mode}, {settings.compress}, a pull for {settings.pull_every}"
        groups.setdefault(name, []).append(run)
    return groups


def plot(runs: list[dict], path: Path) -> None:
    """Accuracy over the mean staleness: a point for each run, a colour for each mode."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(7, 4), layout="constrained").subplots()
    modes = sorted({run["settings"].mode for run in runs})
    for i, mode in enumerate(modes):
        of_mode = [run for run in runs if run["settings"].mode == mode]
        x = [mean_of(run["stalenesses"]) for run in of_mode]
        axes.plot(x, [run["accuracy"] for run in of_mode], "o", color=f"C{i}", label=mode)
    settings = runs[0]["settings"]
    axes.set(xlabel="mean staleness, updates", ylabel="accuracy on what was not trained on")
    axes.set_title(f"{settings.data}, {len(settings.trainers)} trainers, {settings.steps} steps")
    axes.set_xscale("symlog", linthresh=1)
    axes.legend()
    axes.figure.savefig(path, dpi=150)
