"""torch.optim's numbers for tests/unit/optim/optimizer_test.cpp; see make_goldens.py.

Each AdamW case: 20 float32 parameters from 1e-6 to 1e3 in size, gradients from 1e-9 to 1e3 (some zero) that
bf16 holds exactly, and a learning rate that changes every step. The first 12 parameters decay.
The long runs of AdamW and SGD are 100 steps of 8 parameters; their gradients are a formula that the
test knows too, and only the last weights and moments are kept.
"""
import torch

PARAMETERS, DECAYED, STEPS = 20, 12, 6
CASES = [
    {"name": "pytorch_defaults", "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8,
     "weight_decay": 0.01, "learning_rate": 1e-3},
    {"name": "llama_recipe", "beta1": 0.9, "beta2": 0.95, "epsilon": 1e-8, "weight_decay": 0.1,
     "learning_rate": 3e-4},
    {"name": "no_decay", "beta1": 0.8, "beta2": 0.99, "epsilon": 1e-6, "weight_decay": 0.0,
     "learning_rate": 1e-2},
    {"name": "large_epsilon_and_rate", "beta1": 0.95, "beta2": 0.9, "epsilon": 1e-2,
     "weight_decay": 0.5, "learning_rate": 0.5},
]


def spread(generator, low, high):
    """Normal values whose sizes range over powers of ten from low to high."""
    exponent = torch.linspace(low, high, PARAMETERS)[torch.randperm(PARAMETERS,
                                                                    generator=generator)]
    return torch.randn(PARAMETERS, generator=generator) * 10**exponent


def run(case, seed):
    generator = torch.Generator().manual_seed(seed)
    start = spread(generator, -6, 3)
    parts = [start[:DECAYED].clone().requires_grad_(), start[DECAYED:].clone().requires_grad_()]
    optimizer = torch.optim.AdamW(
        [{"params": parts[:1]}, {"params": parts[1:], "weight_decay": 0.0}],
        lr=case["learning_rate"], betas=(case["beta1"], case["beta2"]), eps=case["epsilon"],
        weight_decay=case["weight_decay"], foreach=False)
    steps = []
    for step in range(STEPS):
        gradient = spread(generator, -9, 3).to(torch.bfloat16).float()
        gradient[step::7] = 0.0
        rate = case["learning_rate"] * (1 - 0.1 * step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        parts[0].grad, parts[1].grad = gradient[:DECAYED].clone(), gradient[DECAYED:].clone()
        optimizer.step()
        state = {key: torch.cat([optimizer.state[part][key] for part in parts]).tolist()
                 for key in ("exp_avg", "exp_avg_sq")}
        steps.append({"learning_rate": rate, "gradient": gradient.tolist(),
                      "weight": torch.cat([part.detach() for part in parts]).tolist(), **state})
    return {**case, "start": start.tolist(), "steps": steps}


LONG_PARAMETERS, LONG_STEPS, LONG_RATE = 8, 100, 1e-3
LONG_CASES = [
    {"name": "adamw", "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    {"name": "sgd_momentum", "weight_decay": 0.1, "momentum": 0.9},
    {"name": "sgd", "weight_decay": 0.0, "momentum": 0.0},
]


def long_gradient(step):
    """Multiples of 1/128 in (-1, 1), which bf16 holds exactly."""
    return torch.tensor([(((i + 1) * (step * step + 7 * step + 3) * 40503 >> 8) % 255 - 127) / 128
                         for i in range(LONG_PARAMETERS)])


def long_run(case):
    start = torch.tensor([(i + 1) / 4 * (-1)**i for i in range(LONG_PARAMETERS)])
    weight = start.clone().requires_grad_()
    if case["name"] == "adamw":
        optimizer = torch.optim.AdamW(
            [weight], lr=LONG_RATE, betas=(case["beta1"], case["beta2"]), eps=case["epsilon"],
            weight_decay=case["weight_decay"], foreach=False)
    else:
        optimizer = torch.optim.SGD(
            [weight], lr=LONG_RATE, momentum=case["momentum"],
            weight_decay=case["weight_decay"], foreach=False)
    for step in range(1, LONG_STEPS + 1):
        weight.grad = long_gradient(step)
        optimizer.step()
    state = {key: value.tolist() for key, value in optimizer.state[weight].items()
             if key in ("exp_avg", "exp_avg_sq", "momentum_buffer") and value is not None}
    return {**case, "learning_rate": LONG_RATE, "steps": LONG_STEPS, "start": start.tolist(),
            "weight": weight.tolist(), **state}


def golden():
    return {"decayed": DECAYED, "cases": [run(case, seed) for seed, case in enumerate(CASES)],
            "long": [long_run(case) for case in LONG_CASES]}
