"""Speed and learning next to TRL's GRPOTrainer: same model, prompts, reward and batches."""
