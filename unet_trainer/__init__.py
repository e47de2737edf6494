"""The parts of the trainer, in packages that import in one direction; `train_unet.py` tells the story that joins them."""

import os

# OpenMP's threads spin while they wait for each other. Beside another busy process they then hold the core that the thread they
# wait for needs: on 2 cores a step took 3.4 times as long, with this 1.8 times, and alone as long as before (docs/performance.md).
# Read by libgomp when torch is loaded; a value of the user's own stays.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
