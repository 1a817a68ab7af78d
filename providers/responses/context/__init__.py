"""The context of a model: history, input items, files, sealed content, compaction and truncation."""
