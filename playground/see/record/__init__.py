"""What a run did, recorded as it happened: who sent, received, waited and computed, when, and on which line."""
