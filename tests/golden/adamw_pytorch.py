"""torch.optim.AdamW's numbers for tests/unit/optim/adamw_test.cpp; see make_goldens.py.

Each case: 20 float32 parameters from 1e-6 to 1e3 in size, gradients from 1e-9 to 1e3 (some zero) that
bf16 holds exactly, and a learning rate that changes every step. The first 12 parameters decay.
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


def golden():
    return {"decayed": DECAYED, "cases": [run(case, seed) for seed, case in enumerate(CASES)]}
