"""Continue the pre-training of a whole model together, on your own texts::

    python peers/pretrain.py MODEL TEXTS.jsonl            # the first prints an INVITE
    python peers/pretrain.py MODEL TEXTS.jsonl INVITE     # any number of others, with a model of the same shape

MODEL: a folder, or a name on the Hugging Face hub (OWNER/NAME or hf://OWNER/NAME). TEXTS: a file with {"text": ...} or
{"messages": ...} on each line, or a data set on the hub. Needs the extra hf.
"""

import os
import sys

import torch
import transformers

from p2pdiloco.integrations.datasets import load_texts
from p2pdiloco.integrations.transformers import DiLoCoCallback

CONTEXT = 512
if len(sys.argv) < 3:
    sys.exit(__doc__)
base, texts, *invite = sys.argv[1:]
base, steps = base.removeprefix("hf://"), int(os.environ.get("STEPS", "10000"))
tokenizer = transformers.AutoTokenizer.from_pretrained(base)
# In float32 whatever the file has: small updates are lost in 16 bits. A GPU that can computes in bfloat16 all the same.
model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
end, found = tokenizer.eos_token or "", load_texts(texts, tokenizer=tokenizer)
tokens = [token for text in found for token in tokenizer(text + end)["input_ids"]]
windows = [tokens[start : start + CONTEXT] for start in range(0, len(tokens) - CONTEXT, CONTEXT)]
if not windows:
    sys.exit(f"{texts} has {len(tokens)} tokens, one window takes {CONTEXT + 1}: give more text")

trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments(
        "out",
        max_steps=steps,
        learning_rate=1e-4,
        logging_steps=10,
        bf16=transformers.utils.is_torch_bf16_gpu_available(),
    ),
    train_dataset=[{"input_ids": window, "labels": window} for window in windows],
    callbacks=[DiLoCoCallback(run="pretrain", initial_peers=invite, wait_for_peers=2)],
)
trainer.train()
model.save_pretrained("model")  # for AutoModelForCausalLM.from_pretrained("model")
tokenizer.save_pretrained("model")
