import logging
import warnings

import lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(BoringModel):
    def validation_step(self, batch, index):
        loss = self.loss(self.layer(batch))
        self.log("loss", loss, sync_dist=True)
        return loss


def new_trainer(epochs):
    return lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_find_unused_parameters_true",
        max_epochs=epochs, limit_train_batches=4, limit_val_batches=2, limit_test_batches=2,
        enable_progress_bar=False, enable_model_summary=False, logger=False,
        default_root_dir="lightning", callbacks=[
            ModelCheckpoint("checkpoints", monitor="loss", save_last=True),
            EarlyStopping("loss", patience=9),
        ],
    )  # fmt: skip


if __name__ == "__main__":
    lightning.seed_everything(0, verbose=False)
    model, data = Model(), BoringDataModule()
    trainer = new_trainer(2)
    trainer.fit(model, data)
    trainer.test(model, data, verbose=False)
    again, model = new_trainer(3), Model()
    again.fit(model, data, ckpt_path="checkpoints/last.ckpt")
    total = sum(each.double().sum() for each in model.parameters())
    print(f"{again.global_rank} {float(total):.6f} {again.global_step}\n", end="", flush=True)
