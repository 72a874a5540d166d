"""Files become a ``Checkpoint``, from headers alone, and its facts a ``DraftSpec`` or ``TargetSpec`` with the place each comes from."""
