"""What Prefect is told of a batch, for automations to act on."""

from __future__ import annotations

from typing import Literal

from prefect.events import emit_event

from rollout.batch.prepare import Batch

Kind = Literal["published", "quarantined", "failing"]


def tell(batch: Batch, kind: Kind, **facts: str | int) -> None:
    """Emit `rollout.batch.<kind>` of the resource `rollout.batch.<batch_id>`; Prefect relates it to run and deployment.

    Args:
        facts: references and counts, the event's payload.
    """
    batch_id = batch.plan.batch_id
    emit_event(
        event=f"rollout.batch.{kind}",
        resource={"prefect.resource.id": f"rollout.batch.{batch_id}", "prefect.resource.name": batch_id},
        payload={"batch_id": batch_id, "lake": batch.paths.uri, "rollouts": batch.plan.n_rollouts, **facts},
    )
