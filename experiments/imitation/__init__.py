"""Imitation of scripted demonstrations: makes a base policy where no pretrained one exists."""
