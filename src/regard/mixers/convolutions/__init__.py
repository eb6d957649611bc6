"""Regular, deformable and dynamic convolution as mechanisms."""
