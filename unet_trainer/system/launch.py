"""The place of this process in a torchrun job, by the variables that torchrun sets. Imports no torch."""

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Launch:
    """Rank and number of processes, of the job and on this machine; of a plain python process, the defaults."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    is_torchrun: bool = False

    @property
    def is_main(self) -> bool:
        """Rank 0 decides, writes files and prints."""
        return self.rank == 0


ALONE = Launch()


def read_launch() -> Launch:
    """Read the variables that torchrun sets; others of the kind (SLURM's) are ignored."""
    variables = os.environ
    numbers = [variables.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")]
    if not all(number.isdigit() for number in numbers) or not variables.get("MASTER_ADDR"):
        return ALONE
    rank, world_size, local_rank, _ = map(int, numbers)
    return Launch(rank, world_size, local_rank, int(variables.get("LOCAL_WORLD_SIZE", world_size)), True)
