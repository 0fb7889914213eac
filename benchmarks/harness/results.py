"""Learning runs for several seeds: what is finished is kept in a file, and not run again.

A job is a dict that says what is run: the method, the seed, the steps and so on. Its record is the
job with what came of it, one line of JSON in the file.
"""

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import Size
from benchmarks.harness.hosts import on_hosts
from thinwire.lab import Link

Job = dict[str, Any]
Record = dict[str, Any]


class Results:
    """The records of a file, to which new ones are added; without a file, of this run alone."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        kept = file.read_text() if file is not None and file.exists() else ""
        self.records: list[Record] = [json.loads(line) for line in kept.splitlines()]

    def find(self, job: Job) -> Record | None:
        for record in self.records:
            if all(record.get(name) == value for name, value in job.items()):
                return record
        return None

    def missing(self, jobs: Sequence[Job]) -> list[Job]:
        return [job for job in jobs if self.find(job) is None]

    def of(self, jobs: Sequence[Job]) -> list[Record]:
        return [record for job in jobs if (record := self.find(job)) is not None]

    def add(self, record: Record) -> None:
        """Keeps it, and shows its figures to somebody who waits."""
        self.records.append(record)
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(json.dumps(record) + "\n")
        shown = {name: value for name, value in record.items() if not isinstance(value, list)}
        print(json.dumps(shown), file=sys.stderr, flush=True)


def run_here(jobs: Sequence[Job], results: Results, train: Callable[[Job], Record]) -> list[Record]:
    """The records of these jobs: those that are missing are trained, one by one."""
    for job in results.missing(jobs):
        results.add(job | train(job))
    return results.of(jobs)


def run_on_hosts(
    jobs: Sequence[Job],
    results: Results,
    worker: Callable[[list[Job], Size], None],
    size: Size,
    *,
    hosts: int,
    link: Link | None = None,
) -> list[Record]:
    """The same with all ranks for every job: `worker` runs a list of them and tells the records."""
    missing = results.missing(jobs)
    if missing:
        on_hosts(
            worker,
            *(missing, size),
            hosts=hosts,
            link=link,
            told=lambda rank, record: results.add(record),
        )
    return results.of(jobs)


def over_seeds(losses: Sequence[float]) -> dict[str, Any]:
    """Mean and spread (the largest less the smallest) of rounded losses."""
    seeds = [round(loss, 4) for loss in losses]
    return {
        "mean": round(statistics.mean(seeds), 4),
        "spread": round(max(seeds) - min(seeds), 4),
        "seeds": seeds,
    }
