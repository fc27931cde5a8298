"""A round of a schedule as collectives on a mesh axis; see `decent_jax.gossip.mixing`.

| file | contents | imports |
|---|---|---|
| `axes` | which replicas a device holds | |
| `permute` | a permutation of replicas as slices and ``ppermute`` | axes |
| `groups` | means of groups, and groups that send to each other | axes, permute |
| `wire` | formats of messages | |
| `mixing` | `mix`, `mean`, `receive`: the public functions | all |
"""

from decent_jax.gossip.axes import AxisName as AxisName
from decent_jax.gossip.mixing import Simulated as Simulated
from decent_jax.gossip.mixing import allows_check_vma as allows_check_vma
from decent_jax.gossip.mixing import check_coded as check_coded
from decent_jax.gossip.mixing import mean as mean
from decent_jax.gossip.mixing import mix as mix
from decent_jax.gossip.mixing import mix_coded as mix_coded
from decent_jax.gossip.mixing import number as number
from decent_jax.gossip.mixing import receive as receive
