"""Hot operators of phalanx: a torch reference for each, and faster paths behind the same functions."""
