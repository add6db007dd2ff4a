"""Hot operators of phalanx: a torch reference for each, and faster paths behind the same functions."""

IS_PHALANX = True  # Hugging Face has a package of this name; `launcher.environment` checks which one is imported
