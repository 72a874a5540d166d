"""What a recorded engine version does with a draft: a ``Checkpoint`` through a ``Contract`` is a ``ServedDraft``. Launch lines."""
