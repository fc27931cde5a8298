"""The fields of a config about replicas of several machines, see docs/pipelines.md."""

from decent_jax.gossip import codecs
from decent_jax.ground.fields import Changeable, Field

FIELDS = {
    "pipeline.stages": Changeable(
        0, "stages that each replica is cut into, a Ray actor each; 0: none", at_least=0
    ),
    "pipeline.micro_batches": Field(
        1, "parts of a replica's batch that are on their way through the stages", at_least=1
    ),
    "pipeline.layers": Changeable(
        "", 'layers of each stage, such as "4,4,3"; empty: all take equally long'
    ),
    "pipeline.order": Changeable(
        "1f1b", "order of micro-batches; gpipe: all forward first", choices=("1f1b", "gpipe")
    ),
    "pipeline.wire": Field(
        "bfloat16", "format of activations and their gradients", choices=tuple(codecs.NAMED)
    ),
    "pipeline.address": Changeable(
        "", '"auto" or "host:port" of a Ray cluster; empty: this machine'
    ),
    "pipeline.cpus": Changeable(0.0, "cores that Ray reserves for a stage; 0: none", at_least=0),
    "pipeline.gpus": Changeable(0.0, "GPUs that Ray gives to a stage", at_least=0),
}
