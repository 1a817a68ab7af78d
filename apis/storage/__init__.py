"""What every shared state is built from: the KVStore interface and what is written over it once for all."""
