"""What one optimizer step computes on a batch: passes before the update, credit a token, the terms of the loss."""
