"""Adapters on quantized bases, with the real packages: peers with 4 and with 16 bits of one base train together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import END_S, report, until_founded
from swarm import swarm_in

from p2pdiloco.cli.main import main

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.heavy,
    pytest.mark.long,  # unit tests show fingerprints and shares; this shows that training works
    pytest.mark.skipif(
        not all(map(find_spec, ("transformers", "accelerate", "peft", "bitsandbytes"))),
        reason="needs the extra qlora: pip install -c constraints.txt '.[qlora]'",
    ),
]
SCRIPT = """
import json, sys, time
import peft, torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, Trainer, TrainerCallback, TrainingArguments, set_seed
from p2pdiloco.integrations.transformers import DiLoCoCallback

base, part, bits, state, *peers = sys.argv[1:]
torch.set_num_threads(1)

def walks(part, seed, number):  # each token is one more or one less than the one before; each part has its own tokens
    draws = torch.Generator().manual_seed(seed)
    steps = torch.randint(0, 2, (number, 16), generator=draws) * 2 - 1
    starts = torch.randint(0, 16, (number, 1), generator=draws)
    return (starts + steps.cumsum(1)) % 16 + 16 * part

class Slowly(TrainerCallback):
    def on_step_end(self, *args, **kwargs):
        time.sleep(0.02)

def trained(callbacks):
    set_seed(0)
    how = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True)} if bits == "4" else {}
    model = AutoModelForCausalLM.from_pretrained(base, device_map={"": "cpu"}, **how)
    adapters = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = peft.get_peft_model(model, adapters)
    arguments = TrainingArguments(
        f"{state}/trainer", max_steps=60, per_device_train_batch_size=8, learning_rate=5e-3, save_strategy="no",
        lr_scheduler_type="constant", report_to=[], disable_tqdm=True, use_cpu=True,
    )
    data = [{"input_ids": walk, "labels": walk} for walk in walks(int(part), 1 + int(part), 512)]
    Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()
    held_out = torch.cat([walks(one, 9, 32) for one in range(3)])
    with torch.no_grad():
        return model, float(model.eval()(input_ids=held_out, labels=held_out).loss)

_, alone = trained([])
loopback = ("--listen", "/ip4/127.0.0.1/tcp/0", "--directory-listen", "/ip4/127.0.0.1/tcp/0")
options = {"run": "packed", "initial_peers": peers, "found": part == "0", "access": "open", "wait_for_peers": 3}
model, together = trained([DiLoCoCallback(**options, state=f"{state}/peer", node_options=loopback), Slowly()])
model.save_pretrained(f"{state}/tuned")
held_out = torch.cat([walks(one, 9, 32) for one in range(3)]).tolist()
with open(f"{state}/result.json", "w") as file:
    json.dump({"alone": alone, "together": together, "held_out": held_out}, file)
"""


def make_base(folder: Path) -> Path:
    """A Llama in 16 bits, with norms as a trained one has them."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 64, "intermediate_size": 128}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2))
    for p in model.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("own_logging")
def test_peers_with_4_and_16_bits_learn_what_none_of_them_learns_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has a third of the data. The adapters, merged into the base in 16 bits, are the model that they trained."""
    base = make_base(tmp_path / "base")
    scripts = []
    with swarm_in(tmp_path / "swarm") as swarm:
        address = swarm.start_bootstrap()
        for part, bits in enumerate(("4", "4", "16")):
            state = tmp_path / str(part)
            state.mkdir()
            with open(state / "log", "w") as log:
                command = [sys.executable, "-c", SCRIPT, base, str(part), bits, state, address]
                environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
                scripts.append(subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=environment))
        until_founded(tmp_path / "0" / "peer")
        try:
            statuses = [script.wait(END_S) for script in scripts]
        finally:
            for script in scripts:
                script.kill()
    logs = [(tmp_path / str(part) / "log").read_text() for part in range(3)]
    assert statuses == [0, 0, 0], [log[-2000:] for log in logs]
    assert ["the same base in another precision" in log for log in logs] == [False, False, True]
    assert not any("a different base" in log for log in logs)
    results = [json.loads((tmp_path / str(part) / "result.json").read_text()) for part in range(3)]
    assert max(one["together"] for one in results) < 0.8 * min(one["alone"] for one in results)
    reports = [report(tmp_path / str(part) / "peer") for part in range(3)]
    assert all(one["tokens_trained"] > 0 for one in reports)
    assert len({json.dumps(one["digests"]) for one in reports}) == 1

    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    state, out = tmp_path / "1", tmp_path / "merged"
    command = ["export", str(state / "peer"), "--like", str(state / "tuned"), "--format"]
    assert main([*command, "hf", "--model", str(base), "--out", str(out)]) == 0
    merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.bfloat16)
    walks = torch.tensor(results[0]["held_out"])
    with torch.no_grad():
        loss = float(merged(input_ids=walks, labels=walks).loss)
    assert loss == pytest.approx(results[2]["together"], rel=0.02), "as on the base in 16 bits"

    packed = AutoModelForCausalLM.from_pretrained(base, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
    packed.save_pretrained(tmp_path / "packed")
    capsys.readouterr()
    assert main([*command, "hf", "--model", str(tmp_path / "packed"), "--out", str(tmp_path / "none")]) == 2
    assert "are quantized" in capsys.readouterr().err
    assert main([*command, "peft", "--model", str(tmp_path / "packed"), "--out", str(tmp_path / "adapter")]) == 0
