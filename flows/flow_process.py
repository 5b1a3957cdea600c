"""`python -m flows.flow_process`: the process of one flow run of a worker's, in place of Prefect's `prefect.engine`.

It ends with its worker, whatever ends that, and its children end with it: an engine without an owner would keep
its GPU. SIGTERM, which is how a worker cancels a run, cancels the flow in order: running generations are aborted,
staged shards and the spool stay.
"""

from __future__ import annotations

import runpy

from flows.stopping import stop_flows_by_sigterm
from rollout.process import die_with_parent


def main() -> None:
    """Run the flow run that Prefect's environment variables name."""
    die_with_parent()
    stop_flows_by_sigterm()
    runpy.run_module("prefect.engine", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
