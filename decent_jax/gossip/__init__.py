"""A round of a schedule as collectives on a mesh axis; see `decent_jax.gossip.mixing`.

| file | contents | imports |
|---|---|---|
| `permute` | which replicas a device holds; a permutation as slices and ``ppermute`` | |
| `codecs` | formats of messages, for JAX and NumPy | |
| `groups` | means of groups, encoded or not, and groups that send to each other | permute, codecs |
| `sparse` | codecs that send only some numbers | codecs |
| `mixing` | `mix`, `mix_on`, `on_mesh`, `mean`, `receive`: the public functions | all |
"""

from decent_jax.gossip.mixing import Between as Between
from decent_jax.gossip.mixing import RoundId as RoundId
from decent_jax.gossip.mixing import Simulated as Simulated
from decent_jax.gossip.mixing import check_coded as check_coded
from decent_jax.gossip.mixing import mean as mean
from decent_jax.gossip.mixing import mean_coded as mean_coded
from decent_jax.gossip.mixing import mix as mix
from decent_jax.gossip.mixing import mix_coded as mix_coded
from decent_jax.gossip.mixing import mix_on as mix_on
from decent_jax.gossip.mixing import mixable as mixable
from decent_jax.gossip.mixing import number as number
from decent_jax.gossip.mixing import on_mesh as on_mesh
from decent_jax.gossip.mixing import receive as receive
from decent_jax.gossip.permute import AxisName as AxisName
