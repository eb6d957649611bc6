"""`focus_vit`: a real trained network whose attention is swapped."""
