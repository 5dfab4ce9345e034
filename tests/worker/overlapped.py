"""A runner under the real scheduler, with steps launched ahead of those that are collected, as the engine does."""

from __future__ import annotations

import numpy as np

from shmserve.token_bytes import TokenBytes
from shmserve.worker.commit import Committer
from shmserve.worker.overlap import Overlap
from shmserve.worker.scheduler import Scheduler
from shmserve.worker.sequence import Sequence
from shmserve.worker.stopping import StopConditions


def scheduled(runner, requests) -> tuple[dict[int, list[int]], int]:
    """The tokens of all requests by the scheduler's own steps, and how many steps were launched ahead."""
    scheduler = Scheduler(runner.info, max_num_seqs=3, max_num_batched_tokens=16, eos_ids=(2,))
    vocabulary = TokenBytes.from_list([b"%d " % token for token in range(runner.info.vocab_size)])
    committer = Committer(scheduler, StopConditions(vocabulary, ()))
    overlap = Overlap(runner, scheduler)
    for req_id, (prompt, params) in enumerate(requests):
        ids = np.array(prompt, np.int32)
        scheduler.add(Sequence(req_id, 0, params, ids, arrival_order=req_id, received_ns=1))
    tokens: dict[int, list[int]] = {req_id: [] for req_id in range(len(requests))}
    for step in range(200):
        if not overlap.is_flying:
            batch, _ = scheduler.schedule(step, 1)
            if batch is None:
                return tokens, overlap.num_followed
            overlap.launch(batch)
        overlap.follow(step)
        batch, output = overlap.collect()
        scheduler.advance(batch, output.time_ns, output.failed)
        committed = committer.commit(batch, output, output.time_ns)
        for record in committed.records:
            tokens[int(record["req_id"])].append(int(record["token_ids"][0]))
        for sequence, _ in committed.endings:
            overlap.end(sequence)
        for sequence in overlap.landed():
            scheduler.remove(sequence)
    raise AssertionError("never idle")
