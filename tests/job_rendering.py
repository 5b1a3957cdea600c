"""A flow run's job as Prefect's worker for Kubernetes makes it: `python job_rendering.py TEMPLATE VALUES`.

Runs with tests/manifest-requirements.txt on its path. Prints {"version", "job"} as JSON, once the job is
valid by the schemas of that Kubernetes version, unknown fields refused.
"""

import asyncio
import copy
import json
import sys
from pathlib import Path
from uuid import uuid4

import kubernetes_validate
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration

KUBERNETES = "1.34"


async def main(template: str, values: str) -> None:
    made = await KubernetesWorkerJobConfiguration.from_template_and_values(
        base_job_template=json.loads(Path(template).read_text()), values=json.loads(values)
    )
    made.prepare_for_flow_run(FlowRun(flow_id=uuid4(), name="brave-owl"))
    checked = copy.deepcopy(made.job_manifest)
    for name in ("parallelism", "completions"):  # Prefect demands them where Kubernetes ignores them
        checked["spec"]["template"]["spec"].pop(name)
    version = kubernetes_validate.validate(checked, KUBERNETES, strict=True)
    print(json.dumps({"version": version, "job": made.job_manifest}))


asyncio.run(main(*sys.argv[1:]))
