"""What a controller records so that another one can take its place under the same trainer.

The trainer loses no step when its controller is killed. Its ranks wait for the next controller.
They ask it again what the last one did not answer (controller/client.py). The answers must fit
those that other ranks have had already. The store therefore knows, before any rank does:

* the batch that was assigned to a step (`Store.assign`);
* how many resyncs were requested. Every rank makes them in the same order relative to the batches;
* the version of the last push, and whether a push is going on. Servers are trusted to have the
  version that they report unless one was;
* whether the evaluation of the last version has ended.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from areal_lite.run_dir.store import Store
from areal_lite.run_dir.store_thread import StoreThread

_PREFIX = "handover_"  # of the names in the table `totals`


@dataclass(frozen=True, slots=True, kw_only=True)
class Handover:
    """What the trainer has been told, besides its batches.

    Args:
        resyncs: number of resyncs that were requested since the trainer's start.
        version: version of the last push.
        pushing: 1 between the beginning and the end of a push, else 0.
        evaluated: 1 after the end of the evaluation of the last version, else 0.
    """

    resyncs: int = 0
    version: int = 0
    pushing: int = 0
    evaluated: int = 0


def read_handover(store: Store) -> Handover:
    """Read what the last controller recorded."""
    totals = store.totals()
    return Handover(**{f.name: totals.get(_PREFIX + f.name, 0) for f in fields(Handover)})


def begin_handover(store: Store, version: int) -> Handover:
    """Record that a trainer starts at `version`: nothing has been requested of it."""
    handover = Handover(version=version)
    store.set_totals(_named({f.name: getattr(handover, f.name) for f in fields(Handover)}))
    return handover


async def record_handover(store: StoreThread, **changes: int) -> None:
    """Record changed fields of Handover. They outlive this process when this returns."""
    await store.submit(Store.set_totals, _named(changes))


def _named(values: Mapping[str, int]) -> dict[str, int]:
    return {_PREFIX + name: value for name, value in values.items()}
