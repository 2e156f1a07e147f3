"""The code of a repair, run on the tensors that it is printed for."""

from __future__ import annotations

from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]


def mend(
    mismatch: Any, tensors: Tensors, original: Tensors, config: Any, original_config: Any
) -> None:
    """Run a repair in the terms that it is written in; the tensors or the configuration change."""
    import torch

    roles = mismatch.facts.get("tensors", {})
    if "config[" in mismatch.repair:
        config_code = mismatch.repair.removeprefix("w = original; ")
        exec(config_code, {"config": config, "original": original_config})
        return
    if mismatch.repair.startswith("w = original"):
        tensors.update({name: original[name] for name in roles})
        return

    def run(code: str, **names: str) -> None:
        """The code, whose variables are these tensors."""
        scope: dict[str, Any] = {"torch": torch}
        for variable, name in names.items():
            wanted = torch.tensor(original[name]) if name in original else None
            given = tensors.get(name)
            scope[variable] = torch.zeros_like(wanted) if given is None else torch.tensor(given)
            scope["original_b" if "w" in names and variable == "b" else "original"] = wanted
        weights = [value for value in scope.values() if isinstance(value, torch.Tensor)]
        scope["D"] = max((w.shape[1] for w in weights if w.ndim > 1), default=0)
        if "gain" not in names and "gain" in mismatch.facts:
            scope["gain"] = torch.tensor(tensors[mismatch.facts["gain"]])
        exec(code, scope)
        for variable, name in names.items():
            tensors[name] = np.ascontiguousarray(scope[variable].numpy())

    by_role = {role: name for name, role in roles.items()}
    if "w_q" in mismatch.repair or "b_q" in mismatch.repair:
        names = {"w_q": "query", "w_k": "key", "b_q": "bias of the query", "b_k": "bias of the key"}
        run(mismatch.repair, **{v: by_role[r] for v, r in names.items() if r in by_role})
        return
    for name, role in roles.items():
        beside = by_role.get(f"bias of the {role}".replace("fused", "fused weight"))
        whole = role.removeprefix("bias of the ").replace("fused weight", "fused")
        if role.startswith("bias") and by_role.get(whole):
            continue
        lines = [
            line
            for line in mismatch.repair.split("\n")
            if "  # " not in line or line.endswith((f"# {role}", "rank 4"))
        ]
        variable = next((v for v, start in VARIABLES.items() if role.startswith(start)), "w")
        variable = "b" if variable == "gain" and name.endswith("bias") else variable
        if not beside and variable != "b":
            lines = [line for line in lines if not line.startswith("b")]
        run("\n".join(lines), **{variable: name} | ({"b": beside} if beside else {}))


VARIABLES = {"gain": "norm", "b": "bias", "sinks": "sinks"}
