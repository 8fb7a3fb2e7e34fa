"""Fine-tune a model together with LoRA: its weights stay frozen, and only small adapters are trained and exchanged::

    python peers/lora.py MODEL TEXTS.jsonl            # the first prints an INVITE
    python peers/lora.py MODEL TEXTS.jsonl INVITE     # any number of others, with the same MODEL

MODEL: a folder, or a name on the Hugging Face hub (OWNER/NAME or hf://OWNER/NAME). TEXTS: a file with {"text": ...} or
{"messages": ...} on each line, or a data set on the hub. --load-in-4bit (QLoRA): for small GPUs. Needs the extra hf.
"""

import os
import sys

import peft
import transformers

from p2pdiloco.integrations.datasets import load_texts
from p2pdiloco.integrations.transformers import DiLoCoCallback

given = [word for word in sys.argv[1:] if word != "--load-in-4bit"]
if len(given) < 2:
    sys.exit(__doc__)
base, texts, *invite = given
base, loading, small = base.removeprefix("hf://"), {}, {}
if "--load-in-4bit" in sys.argv:  # needs the extra qlora; some peers may do so, and others not
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16"}
    loading = {"quantization_config": transformers.BitsAndBytesConfig(load_in_4bit=True, **nf4)}
    checkpoints = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    small = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, **checkpoints}
tokenizer = transformers.AutoTokenizer.from_pretrained(base)
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
adapters = peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base, **loading), adapters)
adapters.save_pretrained("tuned")  # how they are applied: others need it to publish or export them while they train
end, found = tokenizer.eos_token or "", load_texts(texts, tokenizer=tokenizer)  # the model learns to stop at the end
tokens = [tokenizer(text + end, truncation=True, max_length=512)["input_ids"] for text in found]

steps = int(os.environ.get("STEPS", "1000"))
trainer = transformers.Trainer(
    model,
    transformers.TrainingArguments("out", max_steps=steps, learning_rate=2e-4, logging_steps=10, **small),
    train_dataset=[{"input_ids": ids, "labels": ids} for ids in tokens],
    data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),  # padding has no label; the end of text has one
    callbacks=[DiLoCoCallback(run="fine-tune", initial_peers=invite, wait_for_peers=2)],
)
trainer.train()
model.save_pretrained("tuned")  # for peft.PeftModel.from_pretrained(base_model, "tuned")
