"""Images: read, cropped, normalised, augmented, fed in a fixed order; a folder of one's own."""
