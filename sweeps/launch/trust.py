"""Check, before a study is continued, that the code and commands that it would run can be trusted.

`launch.json` is checked here. Members are checked in a separate process, because that may import training code.
"""

from __future__ import annotations

from sweeps.launch.planning import plan_in_subprocess
from sweeps.launch.settings import LAUNCH_FILE, LaunchSettings
from sweeps.launch.study import Study
from sweeps.run.trust import belongs_to_user, refusal

# Entry functions (`module:function`) that this version or an earlier one names in `conf/hydra/launcher`.
_ENTRIES = (
    *("lightning_scalerl:run_member", "lightning_scalerl.member.run:run_member"),
    # For members that run commands of other trainers. `check_study` also checks each member's command.
    "sweeps.command.runner:run_member",
)
_PRELOADED = ("lightning_scalerl.", "sweeps.command.", "transformers.models.")
_CHECKS_RUNS = "lightning_scalerl.member.trust:check_runs"


def check_study(study: Study, plan: LaunchSettings) -> None:
    """Check that a study names only code of this package and of the user. No such code is imported in this process.

    Raises:
        UserError: the study names other code. The message has the file, the field, its value and the remedy.
    """
    check_launch(study, plan)
    # Check in a separate process: checking a member imports torch, and perhaps the user's code.
    plan_in_subprocess(_CHECKS_RUNS, [[str(study.run_dir(spec)), spec.run] for spec in study.specs], [])


def check_launch(study: Study, plan: LaunchSettings) -> None:
    """Check the code and commands named in `launch.json`: entry, preloaded modules, and commands of cluster jobs.

    Raises:
        UserError: as for `check_study`.
    """
    file = study.directory / LAUNCH_FILE
    if plan.entry not in _ENTRIES:
        raise refusal(file, "entry", plan.entry, "an entry of lightning_scalerl")
    for module in plan.preload:
        if not module.startswith(_PRELOADED):
            raise refusal(file, "preload", module, "a module of lightning_scalerl or of a model")
    for key, command in (plan.cluster.commands() if plan.cluster else {}).items():
        if command and not belongs_to_user(file):
            raise refusal(file, f"settings.{key}", command, "a setting of yours")
