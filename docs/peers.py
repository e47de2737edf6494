"""Training loops as people have them, to measure ours against: python docs/peers.py lightning|milesial DATA_DIR

DATA_DIR holds images/*.jpg and masks/*.png of 512×512 under the same names; four fifths of them are trained on.
`lightning` is the example of segmentation-models-pytorch (needs the package lightning), `milesial` a loop in the manner
of milesial/Pytorch-UNet with the same model. Both decode, augment and load as users of theirs do: float tensors from
the workers."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

import albumentations as A
import cv2
import numpy as np
import segmentation_models_pytorch as smp
import torch
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm

BATCH_SIZE, NUM_WORKERS, NUM_EPOCHS = 16, 14, 3


class Pairs(Dataset):
    def __init__(self, folder: Path) -> None:
        names = sorted(path.stem for path in (folder / "images").iterdir())
        self.folder, self.names = folder, names[: len(names) * 4 // 5]
        self.transform = A.Compose(
            [
                A.HorizontalFlip(p=0.5),
                A.VerticalFlip(p=0.5),
                A.Affine(
                    scale=(0.8, 1.25),
                    translate_percent=(-0.1, 0.1),
                    rotate=(-30, 30),
                    p=0.7,
                    border_mode=cv2.BORDER_REFLECT_101,
                ),
                A.RandomBrightnessContrast(0.2, 0.2, p=0.5),
            ]
        )

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image = cv2.cvtColor(cv2.imread(str(self.folder / "images" / f"{self.names[index]}.jpg")), cv2.COLOR_BGR2RGB)
        mask = cv2.imread(str(self.folder / "masks" / f"{self.names[index]}.png"), cv2.IMREAD_GRAYSCALE) > 0
        pair = self.transform(image=image, mask=mask.astype(np.uint8))
        return torch.from_numpy(pair["image"]).permute(2, 0, 1).float() / 255, torch.from_numpy(pair["mask"])[
            None
        ].float()


def build_loader(pairs: Pairs) -> DataLoader:
    options = {"num_workers": NUM_WORKERS, "pin_memory": True, "persistent_workers": True}
    return DataLoader(pairs, batch_size=BATCH_SIZE, shuffle=True, drop_last=True, **options)


def lightning(pairs: Pairs) -> list[float]:
    """Seconds of each epoch."""
    import lightning.pytorch as pl

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = smp.Unet("resnet34", encoder_weights=None, classes=1)
            self.register_buffer("mean", torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1))
            self.register_buffer("std", torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1))
            self.loss = smp.losses.DiceLoss(smp.losses.BINARY_MODE, from_logits=True)
            self.counts: list[tuple[torch.Tensor, ...]] = []
            self.seconds: list[float] = []

        def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
            images, masks = batch
            logits = self.model((images - self.mean) / self.std)
            loss = self.loss(logits, masks)
            predicted = (logits.sigmoid() > 0.5).long()
            self.counts.append(smp.metrics.get_stats(predicted, masks.long(), mode="binary"))
            self.log("train_loss", loss, prog_bar=True)
            return loss

        def on_train_epoch_start(self) -> None:
            torch.cuda.synchronize()
            self.started = time.perf_counter()

        def on_train_epoch_end(self) -> None:
            torch.cuda.synchronize()
            self.seconds.append(time.perf_counter() - self.started)
            self.counts.clear()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=2e-4)

    model = Model()
    quiet = {"logger": False, "enable_checkpointing": False, "enable_model_summary": False}
    pl.Trainer(max_epochs=NUM_EPOCHS, precision="bf16-mixed", accelerator="gpu", devices=1, **quiet).fit(
        model, build_loader(pairs)
    )
    return model.seconds


def milesial(pairs: Pairs) -> list[float]:
    """Seconds of each epoch."""
    device, loader, seconds = torch.device("cuda"), build_loader(pairs), []
    model = smp.Unet("resnet34", encoder_weights=None, classes=1).to(memory_format=torch.channels_last).to(device)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-5, weight_decay=1e-8, momentum=0.999, foreach=True)
    scaler, criterion = torch.amp.GradScaler("cuda"), torch.nn.BCEWithLogitsLoss()
    for _ in range(NUM_EPOCHS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        with tqdm(total=len(pairs), file=sys.stderr) as bar:
            for images, masks in loader:
                images = images.to(device, dtype=torch.float32, memory_format=torch.channels_last)
                masks = masks.to(device).squeeze(1)
                with torch.autocast("cuda"):
                    logits = model(images).squeeze(1)
                    shares = torch.sigmoid(logits)
                    overlap, total = 2 * (shares * masks).sum((-1, -2)), shares.sum((-1, -2)) + masks.sum((-1, -2))
                    loss = criterion(logits, masks) + 1 - ((overlap + 1e-6) / (total + 1e-6)).mean()
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                bar.update(len(images))
                bar.set_postfix(**{"loss (batch)": loss.item()})
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
    return seconds


if __name__ == "__main__":
    cv2.setNumThreads(0)
    loop, data = {"lightning": lightning, "milesial": milesial}[sys.argv[1]], Pairs(Path(sys.argv[2]))
    num_images = len(data) // BATCH_SIZE * BATCH_SIZE
    print(sys.argv[1], [round(num_images / seconds, 1) for seconds in loop(data)], "images/s")
