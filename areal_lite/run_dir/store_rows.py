"""Trajectories as rows of the store, and back.

Per token the store has an id and a log-prob, with `rollout.record_text` the text, and with
`algo.routing_replay` the route. Versions and the loss mask follow from the segments, which name
each run of sampled tokens with its version.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from areal_lite.run_dir.store_packing import (
    pack_logprobs,
    pack_routes,
    pack_texts,
    pack_tokens,
    unpack,
    unpack_routes,
    unpack_texts,
)
from areal_lite.run_dir.store_schema import checksum
from areal_lite.trajectory import Trajectory, trace_name

_SEGMENTS = msgspec.json.Decoder(list[tuple[int, int, int]])
_SEQUENCE = ("group_id", "sample_index", "trace_index", "tokens", "logprobs", "texts", "routes")


class Rows(NamedTuple):
    """The values of one trajectory in `trajectories` and in `sequences`.

    `num_bytes` counts those of tokens, log-probs, texts and routes.
    """

    facts: tuple[Any, ...]
    sequence: tuple[Any, ...]
    num_bytes: int


def to_rows(t: Trajectory, prompt: str | None, completion: str | None) -> Rows:
    """Return the rows of a trajectory, with their columns in the order of the tables."""
    segments = [[s.version, s.start, s.end] for s in t.segments]
    min_version, n_prompt, _ = segments[0] if segments else (None, len(t.tokens), None)
    max_version = segments[-1][0] if segments else None
    facts = (
        t.group_id,
        t.sample_index,
        t.trace_index,
        # SQLite has no negative zero.
        None if t.reward is None else float(t.reward) + 0.0,
        t.finish_reason,
        n_prompt,
        len(t.tokens),
        min_version,
        max_version,
        len(segments),
        t.requests,
        t.kv_version,
        float(t.started_at),
        float(t.finished_at),
        t.server,
        msgspec.json.encode(segments).decode(),
    )
    tokens, logprobs = pack_tokens(t.tokens), pack_logprobs(t.behavior_logprobs)
    texts, routes = pack_texts(prompt, completion), pack_routes(t.routes)
    sequence = (t.group_id, t.sample_index, t.trace_index, tokens, logprobs, texts, routes)
    return Rows(
        facts=(*facts, checksum(facts)),
        sequence=(*sequence, checksum(sequence)),
        num_bytes=len(tokens) + len(logprobs) + len(texts or b"") + len(routes or b""),
    )


def decoded(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of WITH_TOKENS with its arrays and texts in the place of what is packed.

    `versions` is int32 [L]. `tokens`, int32 [L], and `logprobs`, float32 [L], are None where they
    are not kept. `segments` is a list of (version, start, end). Raises ValueError for content that
    does not fit.
    """
    row = dict(row)
    del row["sequence_checksum"]
    length, packed = row["n_tokens"], row["tokens"]
    if packed is not None:
        row["tokens"] = unpack(packed, np.int32, length)
        row["logprobs"] = unpack(row["logprobs"], np.float32, length)
    row["segments"] = _SEGMENTS.decode(row["segments"])
    row["versions"] = np.full(length, -1, np.int32)
    for version, start, end in row["segments"]:
        row["versions"][start:end] = version
    row["prompt"], row["completion"] = unpack_texts(row.pop("texts"))
    return row


def check_sums(row: Mapping[str, Any]) -> None:
    """Raise ValueError if a row of WITH_ROUTES, with or without tokens, has a wrong checksum."""
    # The columns of `trajectories` come first, and their checksum ends them.
    columns = list(row)
    good = checksum([row[name] for name in columns[: columns.index("checksum")]]) == row["checksum"]
    if row["tokens"] is not None:
        good &= checksum([row[name] for name in _SEQUENCE]) == row["sequence_checksum"]
    if not good:
        raise ValueError(f"{_name(row)} is damaged: its checksum is wrong")


def from_row(row: Mapping[str, Any], prompt_id: str) -> Trajectory:
    """Return the trajectory of a row of WITH_ROUTES.

    Raises ValueError for a damaged row, and for one without tokens.
    """
    check_sums(row)
    if row["tokens"] is None:
        raise ValueError(f"{_name(row)} lacks its tokens")
    whole = decoded(row)
    trajectory = Trajectory(
        group_id=row["group_id"],
        prompt_id=prompt_id,
        sample_index=row["sample_index"],
        trace_index=row["trace_index"],
        tokens=whole["tokens"],
        loss_mask=whole["versions"] >= 0,
        behavior_logprobs=whole["logprobs"],
        versions=whole["versions"],
        finish_reason=row["finish_reason"],
        reward=row["reward"],
        started_at=row["started_at"],
        finished_at=row["finished_at"],
        server=row["server"],
        requests=row["requests"],
        kv_version=row["kv_version"],
        routes=unpack_routes(row["routes"], row["n_tokens"]),
    ).check()
    if [(s.version, s.start, s.end) for s in trajectory.segments] != whole["segments"]:
        raise ValueError(f"{_name(row)} is damaged: its segments do not fit its tokens")
    return trajectory


def _name(row: Mapping[str, Any]) -> str:
    return f"trajectory {row['group_id']}/{trace_name(row['sample_index'], row['trace_index'])}"
