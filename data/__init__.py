"""Text, tokens and files. A corpus passes through sources, tokenizer, prepare, corpus and batches, in this order."""
