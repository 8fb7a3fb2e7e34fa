"""Fine-tune a model together with LoRA: its weights stay frozen, and only small adapters are trained and exchanged::

    python peers/lora.py MODEL TEXTS.jsonl            # the first prints an INVITE
    python peers/lora.py MODEL TEXTS.jsonl INVITE     # any number of others, with the same MODEL

MODEL: a folder, or a name on the Hugging Face hub. TEXTS: one {"text": ...} per line. Needs the extra hf.
"""

import json
import os
import sys
from pathlib import Path

import peft
import transformers

from p2pdiloco.integrations.transformers import DiLoCoCallback

base, texts, *invite = sys.argv[1:]
steps = int(os.environ.get("STEPS", "1000"))
tokenizer = transformers.AutoTokenizer.from_pretrained(base)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), adapters)
documents = [json.loads(line)["text"] for line in Path(texts).read_text(encoding="utf-8").splitlines()]

trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments("out", max_steps=steps, learning_rate=2e-4, logging_steps=10),
    train_dataset=[tokenizer(text, truncation=True, max_length=512) for text in documents],
    data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
    callbacks=[DiLoCoCallback(run="fine-tune", initial_peers=invite, n_fragments=2, codec="int8", wait_for_peers=2)],
)
trainer.train()
model.save_pretrained("tuned")  # for peft.PeftModel.from_pretrained(base_model, "tuned")
