"""The verifier: runs untrusted programs in isolated workers and says, as a typed verdict, what they do.

It knows nothing of prompts, rewards or populations, and must not import tasks or anything above them; the code that
runs beside untrusted programs (`zygote`, `program`, `policy`, `literals`, `kernel`) imports the standard library only.
"""

from populora_trainer.sandbox.pool import SandboxPool
from populora_trainer.sandbox.verdicts import Case, Judgement, Kind, Limits, Verdict, Verifier

__all__ = ["Case", "Judgement", "Kind", "Limits", "SandboxPool", "Verdict", "Verifier"]
