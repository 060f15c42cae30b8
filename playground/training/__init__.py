"""What `bench steps`, figures, and judges of exercises train with: data and its partition, models,
and ways to average gradients. The lessons have programs of their own.

Data:

    data, digits, prepare  images; where there is no network, digits; and how they come here
    partition              a dataset divided among ranks

Models and their parts:

    tiny_gpt          a GPT, and sequences to train it on
    resnet            torchvision's resnet18 for images of one channel
    activations       what autograd keeps for backward
    context_parallel  attention whose keys travel
    tensor_parallel   where the ranks part and meet

The step, and what keeps replicas equal:

    step               forward, backward, synchronise, step
    replicas           made equal, and compared
    sync               from a loop to overlapping
    averaging          for any model, in buckets
    sharding           ZeRO for any training
    zero_sync          the lesson zero's methods for any training
    sparse_embeddings  rows in use only
    flat_step          one flat tensor, and shared memory
    grad_syncs         all of them by name

Measured and computed:

    step_settings, step_times, step_results  the measurement of training steps
    formulas, mesh_costs                     bytes and seconds in closed form
"""
