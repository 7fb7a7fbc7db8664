//! Tiles in plain Rust: what the instructions do, with the checks that the CPU makes.

#![allow(unsafe_code)] // vector instructions, so that the suite takes seconds

/// Rows and bytes of a row.
pub type Shape = (usize, usize);

/// A product of two tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dot {
    /// Signed bytes with unsigned ones.
    Bytes,
    /// BF16 numbers.
    Bf16,
}

/// A tile: 16 rows of 64 bytes, of which its shape says how many count.
pub type Data = [[u8; 64]; 16];

/// The tile registers.
pub struct Tiles {
    /// Whether they are configured.
    pub on: bool,
    pub shapes: [Shape; 8],
    pub data: [Data; 8],
}

impl Tiles {
    pub const fn new() -> Self {
        Tiles { on: false, shapes: [(0, 0); 8], data: [[[0; 64]; 16]; 8] }
    }

    /// `ldtilecfg`.
    pub fn configure(&mut self, config: &[u8; 64]) -> Result<(), &'static str> {
        if config[0] != 1 || config[1..16].iter().any(|&b| b != 0) {
            return Err("a palette other than 1, or reserved bytes");
        }
        if config[32..48].iter().any(|&b| b != 0) || config[56..].iter().any(|&b| b != 0) {
            return Err("more than 8 tiles");
        }
        for tile in 0..8 {
            let bytes = u16::from_le_bytes([config[16 + 2 * tile], config[17 + 2 * tile]]) as usize;
            let rows = config[48 + tile] as usize;
            if bytes > 64 || rows > 16 || (rows == 0) != (bytes == 0) {
                return Err("a tile of another size than 1..=16 rows of 1..=64 bytes, or none");
            }
            self.shapes[tile] = (rows, bytes);
            self.data[tile] = [[0; 64]; 16];
        }
        self.on = true;
        Ok(())
    }

    /// `tilerelease`.
    pub fn release(&mut self) {
        *self = Tiles::new();
    }

    /// The shape of a tile that an instruction names.
    pub fn shape(&self, tile: usize) -> Result<Shape, &'static str> {
        match self.shapes[tile] {
            _ if !self.on => Err("no tiles are configured"),
            (0, _) => Err("a tile without rows"),
            shape => Ok(shape),
        }
    }

    /// `tilezero`.
    pub fn zero(&mut self, tile: usize) -> Result<(), &'static str> {
        self.shape(tile)?;
        self.data[tile] = [[0; 64]; 16];
        Ok(())
    }

    /// `tdp…`: adds to tile `c` the products of tile `a` with tile `b`.
    pub fn multiply(&mut self, dot: Dot, c: usize, a: usize, b: usize) -> Result<(), &'static str> {
        let [of_c, of_a, of_b] = [self.shape(c)?, self.shape(a)?, self.shape(b)?];
        if c == a || c == b || a == b {
            return Err("a tile twice");
        }
        if of_c.0 != of_a.0 || of_c.1 != of_b.1 || of_a.1 != of_b.0 * 4 || of_c.1 % 4 != 0 {
            return Err("tiles of shapes that do not go together");
        }
        let [to, x, w] = self.data.get_disjoint_mut([c, a, b]).expect("three tiles");
        // SAFETY: this is called where AVX-512 has been detected: it comes with AMX, and the tests that emulate ask for it.
        unsafe {
            match dot {
                Dot::Bytes => multiply_bytes(to, x, w, of_c.0, of_b.0),
                Dot::Bf16 => multiply(to, x, w, of_c.0, of_b.0),
            }
        };
        // What is beyond the shape is zero in a register.
        for (r, row) in to.iter_mut().enumerate() {
            row[if r < of_c.0 { of_c.1 } else { 0 }..].fill(0);
        }
        Ok(())
    }
}

/// A subnormal number is a zero of its sign.
#[inline(always)]
fn flushed(v: f32) -> f32 {
    if v.abs() < f32::MIN_POSITIVE { f32::from_bits(v.to_bits() & 1 << 31) } else { v }
}

/// `rows` rows of sums, `steps` dwords of each.
#[target_feature(enable = "avx512f")]
fn multiply_bytes(to: &mut Data, x: &Data, w: &Data, rows: usize, steps: usize) {
    for (to, x) in to.iter_mut().zip(x).take(rows) {
        let mut sums: [i32; 16] = std::array::from_fn(|n| i32::from_le_bytes(to.as_chunks().0[n]));
        for (x, w) in x.as_chunks::<4>().0.iter().zip(w).take(steps) {
            for (sum, w) in sums.iter_mut().zip(w.as_chunks::<4>().0) {
                for i in 0..4 {
                    *sum = sum.wrapping_add(i32::from(x[i] as i8) * i32::from(w[i]));
                }
            }
        }
        for (to, sum) in to.as_chunks_mut::<4>().0.iter_mut().zip(sums) {
            *to = sum.to_le_bytes();
        }
    }
}

/// As [`multiply_bytes`], of BF16 numbers.
#[target_feature(enable = "avx512f,fma")]
fn multiply(to: &mut Data, x: &Data, w: &Data, rows: usize, steps: usize) {
    // The first and the second of each two are summed apart, from zero.
    let pair = |v: &[u8; 4]| {
        let v = u32::from_le_bytes(*v);
        [flushed(f32::from_bits(v << 16)), flushed(f32::from_bits(v & 0xffff_0000))]
    };
    for (to, x) in to.iter_mut().zip(x).take(rows) {
        let mut chains = [[0f32; 16]; 2];
        for (x, w) in x.as_chunks::<4>().0.iter().zip(w).take(steps) {
            let x = pair(x);
            for (n, w) in w.as_chunks::<4>().0.iter().enumerate() {
                let w = pair(w);
                for i in 0..2 {
                    chains[i][n] = flushed(x[i].mul_add(w[i], chains[i][n]));
                }
            }
        }
        for (n, to) in to.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let before = flushed(f32::from_le_bytes(*to));
            *to = flushed(before + flushed(chains[0][n] + chains[1][n])).to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kt_core::testing::Random;

    /// The configuration of three tiles: sums, `rows` x `steps` dwords, and `steps` x 16 outputs.
    fn config(rows: u8, steps: u8) -> [u8; 64] {
        let mut config = [0; 64];
        config[0] = 1;
        for (tile, (rows, bytes)) in [(rows, 64), (rows, steps * 4), (steps, 64)].into_iter().enumerate() {
            config[16 + 2 * tile] = bytes;
            config[48 + tile] = rows;
        }
        config
    }

    #[test]
    fn products_are_sums_of_products() {
        if !std::arch::is_x86_feature_detected!("avx512f") {
            eprintln!("skipped: this CPU has no avx512f");
            return;
        }
        let mut random = Random(5);
        for (rows, steps) in [(16, 16), (1, 4), (7, 8), (16, 1)] {
            let mut tiles = Tiles::new();
            tiles.configure(&config(rows, steps)).unwrap();
            // Small integers, whose sums are exact.
            let mut fill = |data: &mut Data| {
                for pair in data.as_flattened_mut().as_chunks_mut::<2>().0 {
                    let number = (random.bits() % 65) as f32 - 32.0;
                    *pair = ((number.to_bits() >> 16) as u16).to_le_bytes();
                }
            };
            fill(&mut tiles.data[1]);
            fill(&mut tiles.data[2]);
            tiles.multiply(Dot::Bf16, 0, 1, 2).unwrap();
            tiles.multiply(Dot::Bf16, 0, 1, 2).unwrap();
            let [to, x, w, ..] = &tiles.data;
            let at = |v: &[u8; 64], k: usize| {
                f32::from_bits(u32::from(u16::from_le_bytes([v[2 * k], v[2 * k + 1]])) << 16) as f64
            };
            for r in 0..16 {
                for n in 0..16 {
                    let mut want = 0f64;
                    for k in 0..if r < rows as usize { 2 * steps as usize } else { 0 } {
                        want += 2.0 * at(&x[r], k) * at(&w[k / 2], 2 * n + k % 2);
                    }
                    let got = f32::from_le_bytes(to[r].as_chunks::<4>().0[n]) as f64;
                    assert_eq!(got, want, "{rows}x{steps}: row {r}, output {n}");
                }
            }
        }
    }

    #[test]
    fn products_of_bytes_are_sums_of_products() {
        if !std::arch::is_x86_feature_detected!("avx512f") {
            eprintln!("skipped: this CPU has no avx512f");
            return;
        }
        let mut random = Random(6);
        for (rows, steps) in [(16, 16), (1, 4), (7, 8), (16, 1)] {
            let mut tiles = Tiles::new();
            tiles.configure(&config(rows, steps)).unwrap();
            for tile in [1, 2] {
                tiles.data[tile].as_flattened_mut().iter_mut().for_each(|b| *b = random.bits() as u8);
            }
            tiles.multiply(Dot::Bytes, 0, 1, 2).unwrap();
            tiles.multiply(Dot::Bytes, 0, 1, 2).unwrap();
            let [to, x, w, ..] = &tiles.data;
            for r in 0..16 {
                for n in 0..16 {
                    let columns = 0..if r < rows as usize { 4 * steps as usize } else { 0 };
                    let of = |k: usize| i32::from(x[r][k] as i8) * i32::from(w[k / 4][4 * n + k % 4]);
                    let got = i32::from_le_bytes(to[r].as_chunks::<4>().0[n]);
                    assert_eq!(got, 2 * columns.map(of).sum::<i32>(), "{rows}x{steps}: row {r}, output {n}");
                }
            }
        }
    }

    #[test]
    fn what_the_cpu_traps_on_is_refused() {
        let mut tiles = Tiles::new();
        assert!(tiles.zero(0).is_err() && tiles.multiply(Dot::Bf16, 0, 1, 2).is_err(), "not configured");
        for (at, value) in [(0, 2), (1, 1), (5, 1), (16, 65), (48, 17), (48, 0), (16, 0), (32, 4), (57, 1)] {
            let mut wrong = config(16, 16);
            wrong[at] = value;
            assert!(tiles.configure(&wrong).is_err(), "byte {at} = {value}");
        }
        tiles.configure(&config(16, 8)).unwrap();
        assert!(tiles.zero(0).is_ok() && tiles.zero(3).is_err());
        // Operands exchanged, or one of them twice.
        assert!(tiles.multiply(Dot::Bf16, 0, 2, 1).is_err() && tiles.multiply(Dot::Bf16, 0, 1, 1).is_err());
        tiles.release();
        assert!(tiles.zero(0).is_err());
    }
}
