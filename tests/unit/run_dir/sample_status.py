"""A status of a controller whose trainer waits for the batch of its eighth step."""

from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase

STATUS = ControllerStatus(
    version=6,
    step=7,
    trainer=TrainerPhase.WAITING,
    batch_step=7,
    missing_groups=3,
    queued_groups=5,
    running_groups=2,
    capacity=4,
    in_flight=16,
    concurrency_limit=32,
    requests=15,
    servers_ready=1,
    servers_announced=2,
    evaluating=[4],
    evaluated="118 of 400",
)
