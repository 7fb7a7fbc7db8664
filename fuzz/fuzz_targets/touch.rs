//! Uses all that an opened checkpoint offers.

use kt_core::{Matrix, Proj, WeightSource};

fn read(matrix: &Matrix) {
    // Shapes of a hostile file may be large without holding a byte (no rows): bound the work.
    if matrix.rows() > 0 && matrix.cols() <= 1 << 20 {
        let mut row = vec![0.0; matrix.cols()];
        matrix.decode_row(0, &mut row);
        matrix.decode_row(matrix.rows() - 1, &mut row);
    }
    if matrix.byte_len() <= 1 << 20 {
        let _ = matrix.check_scales();
    }
}

pub fn everything(source: &dyn WeightSource) {
    for layer in source.layers() {
        for expert in [0, layer.experts.saturating_sub(1), layer.experts] {
            for proj in Proj::ALL {
                if let Ok(matrix) = source.matrix(layer.index, expert, proj) {
                    read(&matrix);
                }
                let _ = source.bias(layer.index, expert, proj);
                let _ = source.tensor_name(layer.index, expert, proj);
            }
            source.release(layer.index, expert);
        }
        let _ = source.routing(layer.index);
        let _ = (layer.expert_bytes(), layer.format_label());
    }
    for name in source.tensors() {
        if let Ok(matrix) = source.tensor(&name) {
            read(&matrix);
        }
        source.release_tensor(&name);
    }
    let _ = (source.metadata().family(), source.dense_bytes());
    let _ = source.side_file("tokenizer.json");
}
