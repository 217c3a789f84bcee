"""Fine-tunes a Hugging Face Llama whose state stays within budgets, on a file of overspill prepare.

overspill prepare chats.jsonl --tokenizer MODEL --packing one -o data
python finetune.py MODEL data/train.tokens /mnt/nvme0/swap out
"""

import sys

import torch
import transformers

import overspill.torch
from overspill.prepare import read_token_file

directory, data, swap, output = sys.argv[1:]
with torch.device("meta"):  # host memory never holds the model
    config = transformers.AutoConfig.from_pretrained(directory)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
offload = {"device_memory": "8GiB", "host_memory": "8GiB", "nvme_paths": [swap]}
settings = {"gradient_accumulation_steps": 4, "max_grad_norm": 1.0, "offload": offload}
model, optimizer = overspill.torch.wrap(model, settings, lr=2e-5, weights=directory)
model.gradient_checkpointing_enable()
model.train()

file = read_token_file(data)
sequences = torch.from_numpy(file.tokens.astype("int64")).view(-1, file.sequence_len)
trained = torch.from_numpy(file.mask()).view(-1, file.sequence_len).bool()
for number, (tokens, mask) in enumerate(zip(sequences, trained, strict=True), 1):
    labels = torch.where(mask, tokens, -100)
    loss = model(input_ids=tokens[None], labels=labels[None], use_cache=False).loss
    (loss / 4).backward()
    if number % 4 == 0:
        optimizer.step()
        print(f"{number}: loss {loss.item():.4f}, norm {optimizer.result().gradient_norm:.3f}")
optimizer.engine.export_weights(output, config.to_json_string())
optimizer.close()
