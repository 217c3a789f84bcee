"""transformers' Adafactor for tests/unit/optim/adafactor_test.cpp; see make_goldens.py.

Thirty steps of a matrix and a vector in float32 with scale_parameter=False, relative_step=False, no
first moment and a clip_threshold that never clips. Gradients are exact in bf16, and only every tenth
step's weights and the last moments are kept.
"""
import torch
from transformers.optimization import Adafactor

ROWS, COLUMNS, VECTOR, STEPS = 5, 7, 4, 30
RATE, DECAY, WEIGHT_DECAY = 3e-3, 0.8, 0.1


def golden():
    generator = torch.Generator().manual_seed(8)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator))
                  for shape in [(ROWS, COLUMNS), (VECTOR,)]]
    flat = lambda tensors: [x for t in tensors for x in t.detach().flatten().tolist()]
    result = {"rows": ROWS, "columns": COLUMNS, "learning_rate": RATE,
              "weight_decay": WEIGHT_DECAY, "decay": DECAY, "start": flat(parameters),
              "gradients": [], "weights": {}}
    optimizer = Adafactor(
        [{"params": parameters[:1], "weight_decay": WEIGHT_DECAY},
         {"params": parameters[1:], "weight_decay": 0.0}],
        lr=RATE, eps=(1e-30, 1e-3), clip_threshold=1e9, decay_rate=-DECAY, beta1=None,
        scale_parameter=False, relative_step=False, warmup_init=False)
    for step in range(1, STEPS + 1):
        for p in parameters:
            size = 10 ** torch.randint(-3, 2, p.shape, generator=generator).float()
            p.grad = (torch.randn(p.shape, generator=generator) * size).bfloat16().float()
        result["gradients"].append(flat(p.grad for p in parameters))
        optimizer.step()
        if step % 10 == 0:
            result["weights"][str(step)] = flat(parameters)
    matrix, vector = (optimizer.state[p] for p in parameters)
    result["exp_avg_sq_row"] = flat([matrix["exp_avg_sq_row"]])
    result["exp_avg_sq_col"] = flat([matrix["exp_avg_sq_col"]])
    result["exp_avg_sq"] = flat([vector["exp_avg_sq"]])
    return result
