"""check(): is an exercise solved? In one line it says what is wrong, in the kernel or on ranks.

    check(right, answer, hints=["...", "..."])

right(answer) raises an AssertionError whose message says what is wrong; whatever else it raises
is told as well. The cell never fails, so that the rest of the page can be run.
"""

_tries = {}  # name of the check -> wrong answers so far


def check(right, *answers, hints=()) -> None:
    """Print "not answered yet", "not yet: ..." or "correct".

    right: a function of the answers. It asserts; its name is the name of the exercise.
    answers: what the reader has set; None, for any of them, means not answered.
    hints: texts. The first is added from the second wrong answer on, the next from the third.

    In a %%px cell all ranks call it, and one line is printed for all of them: what is wrong on the
    first rank on which something is. `right` must then let every rank take part in its collectives.
    """
    import torch.distributed as dist  # not above: course.py comes before torch

    answered = all(answer is not None for answer in answers)
    problem = _problem(right, answers) if answered else None
    on_ranks = dist.is_initialized() and dist.get_world_size() > 1
    if on_ranks:
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, (answered, problem))
        answered = all(on_rank for on_rank, _ in found)
        problem = next((text for _, text in found if text), None)
    line = "correct"
    if not answered:
        line = "not answered yet"
    elif problem:
        tries = _tries[right.__name__] = _tries.get(right.__name__, 0) + 1
        hint = [f" (Hint: {text})" for text in hints[: tries - 1]][-1:]
        line = "not yet: " + problem + "".join(hint)
    if not on_ranks or dist.get_rank() == 0:
        print(line)


def _problem(right, answers) -> str | None:
    try:
        right(*answers)
    except AssertionError as wrong:
        return str(wrong) or "wrong"
    except Exception as error:  # of the reader's own function
        return f"it raises {type(error).__name__}: {error}".splitlines()[0]
    return None
