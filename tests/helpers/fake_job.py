"""One process of a torchrun job, alone: what it would exchange with the others is given."""

from unet_trainer.system.launch import Launch
from unet_trainer.training.parallel import Job


class FakeJob(Job):
    """`exchanges`: functions in place of methods, by their names."""

    def __init__(self, rank=0, world_size=2, **exchanges):
        super().__init__(Launch(rank, world_size, rank, world_size, is_torchrun=True))
        vars(self).update(exchanges)
