"""The command line of benchmarks whose option is `--full`."""

import argparse


def command_line(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="run all repetitions; this can take hours")
    return parser


def asks_for_all_repetitions(description: str | None) -> bool:
    """Parse the command line; whether it has `--full`. With `--help`, or with what is not known, the process ends."""
    return bool(command_line(description).parse_args().full)
