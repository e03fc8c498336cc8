"""Ask what a training that already ran, or still runs, waits for."""

from kfp import dsl

from kfp_gate.components import diagnose_training


@dsl.pipeline(name="why-is-it-slow")
def why_is_it_slow(checkpoint_uri: str):
    diagnose_training(run_uri=checkpoint_uri)
