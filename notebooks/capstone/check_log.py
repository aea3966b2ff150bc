"""Check what you have read from the log of a job: which rank, which line, which cause?

    python notebooks/capstone/check_log.py 1
    python notebooks/capstone/check_log.py 1 --rank 0 --line 28 --cause a   # wrong: status 1

The first command prints the causes to choose from. logs/answers.py holds the answers.
"""

import argparse
import re
import sys

from logs.answers import JOBS, Job


def main() -> None:
    args = parse_args()
    job = JOBS[args.job]
    if args.rank is None or args.line is None or args.cause is None:
        print(f"Job {args.job}: {job.question}? Which line of")
        print(f"logs/job_{args.job}.py is the mistake (--line), and what is the cause (--cause)?")
        for letter, cause in zip("abcd", job.causes, strict=True):
            print(f"  {letter}  {cause.text}")
        return
    mistake = wrong(job, args.rank, args.line, args.cause)
    print(f"not yet: {mistake}" if mistake else f"correct: {job.why}")
    sys.exit(bool(mistake))


def wrong(job: Job, ranks: set[int], line: int, letter: str) -> str:
    """What is wrong with an answer, the rank first; "" if it is right."""
    if ranks != job.ranks:
        return job.wrong_ranks
    if line not in job.lines():
        source = job.source()
        text = source[line - 1].strip() if 0 < line <= len(source) else ""
        return job.wrong_lines.get(text, f'line {line} is "{text}": {job.wrong_line}')
    return job.causes["abcd".index(letter)].mistake


def ranks_of(text: str) -> set[int]:
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise argparse.ArgumentTypeError("a rank such as 0, or ranks such as 0,1")
    return {int(number) for number in text.split(",")}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("job", type=int, choices=sorted(JOBS), help="1, 2 or 3")
    add("--rank", type=ranks_of, help="a rank, or several such as 0,1")
    add("--line", type=int, help="the number of a line of the script")
    add("--cause", choices=("a", "b", "c", "d"), help="the letter of a cause")
    return parser.parse_args()


if __name__ == "__main__":
    main()
