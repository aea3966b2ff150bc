"""The answers to the three logs, for check_log.py: do not read on before you have yours."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Cause:
    text: str
    mistake: str = ""  # what speaks against it; "" for the right one


@dataclass(frozen=True)
class Job:
    number: int
    ranks: set[int]  # the answer to `question`
    wrong_ranks: str  # the hint if other ranks are named
    code: tuple[str, ...]  # the lines that may be named, without indentation
    wrong_line: str  # the hint if another line is named
    wrong_lines: dict[str, str]  # and about tempting ones
    causes: tuple[Cause, ...]  # a, b, c, d
    why: str
    question: str = "which rank makes the mistake (--rank)"

    def source(self) -> list[str]:
        file = Path(__file__).with_name(f"job_{self.number}.py")
        return file.read_text().splitlines()

    def lines(self) -> list[int]:
        """The numbers of the lines that may be named."""
        return [n for n, line in enumerate(self.source(), 1) if line.strip() in self.code]


NOT_WRONG = "it does what it should, in the right place"

JOBS = {
    1: Job(
        1,
        {2},
        "all three raise because they wait: which rank has called backward() once less than the "
        "other ranks, and waits elsewhere?",
        (
            "continue",
            "if local_y.max() > 2:",
        ),
        "it is not the line that keeps this rank away from a collective",
        {
            "loss.backward()": "in this line ranks wait for a rank that does not come: where does "
            "that rank go instead?",
            "dist.barrier()": "rank 2 waits here because it is one step ahead: where has it left "
            "one out?",
            "y[47] = 3  # a typing error": "without the check the job would end at "
            "once with an IndexError: which line makes a hang of it?",
        },
        (
            Cause(
                "the network between the ranks is slow: the timeout of 30 s is too short",
                "three steps went well on all ranks, and a longer timeout only delays the error",
            ),
            Cause(
                "rank 2 leaves out a backward(), in which the other ranks wait for it",
            ),
            Cause(
                "a label is out of range, and cross_entropy raises IndexError on one rank",
                "no rank has raised IndexError: the script found the label before",
            ),
            Cause(
                "the ranks got unequal numbers of samples from the data set",
                "each rank has 30 samples: 90 divide by 3",
            ),
        ),
        "a rank that leaves out a step leaves out its collectives. From then on each of its "
        "all-reduces meets the other ranks' all-reduce of the step before, and their last one has "
        "no partner. Let it call backward() on a loss of 0, or let all ranks agree to leave the "
        "step out",
    ),
    2: Job(
        2,
        {1, 2},
        "compare the norms at step 20 of both starts: which ranks do not continue with what was "
        "saved? That they are the majority proves nothing",
        ("if rank == 0 and file.exists():",),
        "it is not the line that gives these ranks other weights",
        {
            'net.load_state_dict(state["net"])': "the line itself is right: which line decides "
            "who runs it?",
            'optimizer.load_state_dict(state["optimizer"])': "the norms differ before the "
            "optimizer has made a step: which line decides who loads?",
            "ddp_net = DistributedDataParallel(net)": "it sends rank 0's weights, once: at this "
            "moment rank 0 has not loaded them",
            "dist.broadcast(step, src=0)": "all ranks print the right step: what was not sent?",
            "torch.manual_seed(0)": "the ranks agreed in the whole first start, seeded so",
        },
        (
            Cause(
                "the checkpoint lacks the weights of ranks 1 and 2",
                "under DDP all ranks hold the same weights: those of rank 0 are enough",
            ),
            Cause(
                "rank 0 loads after DDP has sent its weights, so no other rank gets what it loads",
            ),
            Cause(
                "the file was damaged when it was written",
                "rank 0 continues with exactly the norm that it had: the file is good",
            ),
            Cause(
                "the random generators were not restored, so the ranks saw other data",
                "each start draws the same numbers from seed 0, and other data does not change "
                "weights before the first step",
            ),
        ),
        "DDP compares nothing later: equal gradients, of unequal weights, keep them unequal, and "
        "no error comes. Load on every rank: to load on rank 0 before net is wrapped is not "
        "enough, because DDP sends no state of the optimizer",
        "which ranks hold wrong weights (--rank, such as 0 or 0,1)",
    ),
    3: Job(
        3,
        {0},
        "this rank does what the script asks of it, in the order of the other ranks: which rank "
        "calls a collective alone?",
        (
            "if rank == 0:",
            'print(f"epoch {epoch}: accuracy {accuracy(net, x[30:], y[30:]):.3f}", flush=True)',
        ),
        "it is not the line from which one rank alone comes to a collective",
        {
            "dist.all_reduce(counts)": "this line is right if all ranks reach it: which line lets "
            "one rank alone through?",
            "loss.backward()": "ranks 1 and 2 are here rightly, in the next epoch: what does "
            "rank 0 call instead?",
            "dist.barrier()": "no rank has come so far",
        },
        (
            Cause(
                "the ranks hold networks of different sizes, so their gradients do not match",
                "three steps of an epoch went well with these networks",
            ),
            Cause(
                "the all_reduce on rank 0 needs floating-point numbers, and counts are integers",
                "all_reduce adds integers, too: the message names a number of bytes",
            ),
            Cause(
                "one rank calls an all_reduce of its own, which meets other ranks' next gradients",
            ),
            Cause(
                "the network broke: rank 2 reports that its connection was closed",
                "the connection ended with the process of rank 0, whose exit code is -6: why that?",
            ),
        ),
        "collectives are matched by their order, not by their names. Let all ranks call "
        "accuracy(), and rank 0 alone print",
    ),
}
