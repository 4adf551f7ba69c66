"""The LightningModule: one step and its optimiser, nothing else.

Legend: B items, P patches, C columns, D class embedding width, K coarse names.
"""

from collections.abc import Mapping
from typing import Any

import pytorch_lightning as pl
import torch
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import Tensor

from noctowl.data.batch import Batch
from noctowl.data.datamodule import DataModule
from noctowl.data.order import Order
from noctowl.errors import ModelError
from noctowl.losses import LossTerms, compute_losses
from noctowl.matcher import match
from noctowl.model import TRAINABLE, ImageFeatures, OwlDetector

PREFIX = "detector.model."


class NoctOWL(pl.LightningModule):
    """Trains `class_head.dense0` of a detector.

    Args:
        detector: frozen but for its class head.
        loss: keyword arguments of `compute_losses` that choose and weigh the class and background terms.
        distill: "none", "mse" or "ce", with its `weight`.
        coarse_queries: [K, D] unit embeddings of the coarse names; needed unless distill is "none".
        compat: the published oddities of the loss terms (see `noctowl.losses` and `noctowl.head.cosine`).
        optimizer: name (timm), lr, weight_decay, decay_bias.
        schedule: name ("constant" or "cosine"), warmup_epochs, min_lr.
    """

    coarse_queries: Tensor | None

    def __init__(
        self,
        *,
        detector: OwlDetector,
        loss: Mapping[str, Any],
        distill: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        schedule: Mapping[str, Any],
        coarse_queries: Tensor | None = None,
        compat: bool = True,
    ):
        super().__init__()
        self.detector = detector
        detector.freeze()
        self.loss, self.distill, self.compat = dict(loss), dict(distill), compat
        self.optimizer_settings, self.schedule_settings = dict(optimizer), dict(schedule)
        if self.distill["name"] != "none" and coarse_queries is None:
            raise ModelError(f"distill={self.distill['name']} needs the embeddings of coarse names")
        self.register_buffer("coarse_queries", coarse_queries, persistent=False)
        self.strict_loading = False  # checkpoints hold the trainable layer only; load_state_dict below is stricter

    # One step

    def features(self, batch: Batch) -> ImageFeatures:
        """Stored features of the batch, or those of its pixels: the one place where the two ways meet."""
        if batch.tokens is not None and batch.patch_boxes is not None:
            return ImageFeatures(batch.tokens, batch.patch_boxes, None)
        assert batch.pixel_values is not None  # `collate` fills one of the two
        return self.detector.encode_images(batch.pixel_values)

    def losses(self, batch: Batch) -> tuple[LossTerms, int]:
        """Loss terms of a batch and its number of foreground patches."""
        tokens, patch_boxes, _ = self.features(batch)
        with torch.autocast(tokens.device.type, enabled=False):
            head = self.detector.head
            similarities = head.lean_similarity(tokens, batch.queries, query_epsilon=self.compat)  # [B, P, C]
            assignment = match(
                pred_boxes=patch_boxes,
                similarities=similarities.detach(),
                gt_boxes=batch.gt_boxes,
                gt_mask=batch.gt_mask,
                query_mask=batch.query_mask,
            )
            positive = assignment.positive
            student = teacher = None
            if self.distill["name"] != "none":
                assert self.coarse_queries is not None  # checked in __init__
                student, teacher = self.detector.coarse_pair(
                    tokens[positive], self.coarse_queries, query_epsilon=self.compat
                )  # [n, K]
            options = {k: v for k, v in self.loss.items() if k in ("margin", "temperature", "gamma")}
            terms = compute_losses(
                similarities=similarities,
                positive=positive,
                query_mask=batch.query_mask,
                patch_weights=batch.patch_weights,
                kind=self.loss["name"],
                distill=self.distill["name"],
                student=student,
                teacher=teacher,
                class_weight=self.loss["weight"],
                background_weight=self.loss["background_weight"],
                distillation_weight=self.distill.get("weight", 0.0),
                compat=self.compat,
                **options,
            )
        return terms, int(positive.sum())

    def report(self, values: Mapping[str, Any], **options: Any) -> None:
        """Log figures. A module that trains several heads puts its own way in this one's place."""
        self.log_dict(dict(values), **options)

    def scaled_loss(
        self, batch: Batch, batch_idx: int, *, accumulate: int, n_batches: int, rank: int = 0, world_size: int = 1
    ) -> Tensor:
        """Loss of one batch, logged, and scaled so that an incomplete last window is a mean over what it holds.

        Every loss is divided by `accumulate` afterwards, and gradients are averaged over processes, also in a window
        that has fewer batches. `n_batches` counts those of all processes; a process that has none left in the last
        round repeats one (see `Order`), with weight 0.
        """
        terms, n_positive = self.losses(batch)
        real = batch_idx * world_size + rank < n_batches
        values = {f"train/{name}": value for name, value in terms.as_dict().items()}
        values["train/positives"] = torch.tensor(n_positive / len(batch))
        self.report(values, on_step=True, on_epoch=True, batch_size=len(batch) if real else 0, sync_dist=True)
        full = accumulate * world_size
        window = min(full, n_batches - batch_idx // accumulate * full)
        return terms.total * (full / window if real else 0.0)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """One batch of the one head; Lightning divides by the number of accumulated batches."""
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        n_batches = int(self.trainer.num_training_batches) * world_size
        sampler = getattr(self.trainer.train_dataloader, "sampler", None)
        if isinstance(sampler, Order):
            n_batches = min(n_batches, sampler.batches)
        accumulate = self.trainer.accumulate_grad_batches
        return self.scaled_loss(
            batch, batch_idx, accumulate=accumulate, n_batches=n_batches, rank=rank, world_size=world_size
        )

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Logs the gradient's norm over the trainable layer, and the rate."""
        gradients = [p.grad.float() for p in self.detector.head.dense0.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
        self.report({"train/grad_norm": norm, "train/lr": optimizer.param_groups[0]["lr"]}, on_step=True)

    # Optimiser

    def make_optimizer(self, *, epochs: int, updates_per_epoch: int) -> tuple[torch.optim.Optimizer, Scheduler | None]:
        """timm's optimiser over the trainable layer, and timm's schedule; None for a constant rate."""
        chosen, schedule = self.optimizer_settings, self.schedule_settings
        optimizer = create_optimizer_v2(
            self.detector.head.dense0,
            opt=chosen["name"],
            lr=chosen["lr"],
            weight_decay=chosen["weight_decay"],
            filter_bias_and_bn=not chosen["decay_bias"],
        )
        if schedule["name"] == "constant" and not schedule["warmup_epochs"]:
            return optimizer, None
        shape: dict[str, Any] = {"sched": "step", "decay_rate": 1.0}  # a constant rate behind the warm-up
        if schedule["name"] == "cosine":
            shape = {"sched": "cosine"}
        scheduler, _ = create_scheduler_v2(
            optimizer,
            num_epochs=epochs - schedule["warmup_epochs"],  # the warm-up comes before the cosine
            decay_epochs=epochs,
            min_lr=schedule["min_lr"],
            warmup_epochs=schedule["warmup_epochs"],
            warmup_lr=chosen["lr"] / 100,
            warmup_prefix=True,
            step_on_epochs=False,
            updates_per_epoch=updates_per_epoch,
            **shape,
        )
        return optimizer, scheduler

    def configure_optimizers(self) -> Any:
        """For Lightning: the schedule is stepped per update."""
        epochs = int(self.trainer.max_epochs or 1)
        data = getattr(self.trainer, "datamodule", None)
        if isinstance(data, DataModule):  # asking the trainer would make it begin to read, before a place is restored
            updates = -(-data.rounds(data.order()) // self.trainer.accumulate_grad_batches)
        else:
            updates = -(-int(self.trainer.estimated_stepping_batches) // epochs)
        optimizer, scheduler = self.make_optimizer(epochs=epochs, updates_per_epoch=updates)
        if scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        """timm's schedules are told the number of updates made; they keep no count of their own."""
        assert isinstance(scheduler, Scheduler)
        scheduler.step_update(num_updates=self.global_step)

    # Checkpoints: the trainable layer and the identity of its base

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Keep the trainable weights only, and say which base they belong to."""
        checkpoint["state_dict"] = {PREFIX + k: v for k, v in self.detector.trainable_state().items()}
        checkpoint["noctowl"] = {"base": self.detector.base_id, "base_sha256": self.detector.content_hash()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Strict: exactly the trainable keys, trained on exactly this base. Raises ModelError otherwise."""
        state = {k.removeprefix(PREFIX): v for k, v in checkpoint["state_dict"].items()}
        if "noctowl" not in checkpoint:
            raise ModelError("the checkpoint does not say which base it was trained on: it is not one of noctowl's")
        if set(state) != set(TRAINABLE):
            raise ModelError(f"the checkpoint holds {sorted(state)}; exactly {sorted(TRAINABLE)} are allowed")
        self.detector.load_trainable(state, checkpoint["noctowl"]["base_sha256"])
