"""The rooms of the trainer. Each module can be read alone; `train_unet.py` tells the story that joins them."""
