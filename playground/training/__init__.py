"""What `bench steps`, figures, and judges of exercises train with: data and its partition, models,
and ways to average gradients. The lessons have programs of their own."""
