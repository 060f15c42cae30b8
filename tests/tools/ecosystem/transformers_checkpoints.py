import os
import warnings

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

warnings.filterwarnings("ignore")


class Pairs(torch.utils.data.Dataset):
    def __len__(self):
        return 33

    def __getitem__(self, index):
        drawn = torch.randint(0, 50, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": drawn, "labels": torch.tensor(index % 2)}


def new_trainer(epochs):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, vocab_size=50, intermediate_size=16))
    arguments = TrainingArguments(
        output_dir="out", per_device_train_batch_size=4, num_train_epochs=epochs, report_to=[],
        gradient_accumulation_steps=2, save_strategy="epoch", save_total_limit=1, use_cpu=True,
        disable_tqdm=True, logging_strategy="no", eval_strategy="epoch", max_grad_norm=0.5,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Pairs(), eval_dataset=Pairs())
    trainer.remove_callback(PrinterCallback)
    return trainer


if __name__ == "__main__":
    new_trainer(1).train()
    trainer = new_trainer(2)
    trainer.train(resume_from_checkpoint=True)
    loss = trainer.evaluate()["eval_loss"]
    total = sum(each.double().sum() for each in trainer.model.parameters())
    print(f"{os.environ['RANK']} {float(total):.6f} {loss:.6f}\n", end="", flush=True)
