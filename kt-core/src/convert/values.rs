//! GGUF metadata as a writer puts it down.

/// Keys and values in GGUF's encoding, in the order that they were put.
#[derive(Default)]
pub struct Pairs {
    bytes: Vec<u8>,
    count: u64,
}

/// Appends a text as GGUF stores it.
pub fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Pairs {
    fn put(&mut self, key: &str, kind: u32, value: impl FnOnce(&mut Vec<u8>)) {
        string(&mut self.bytes, key);
        self.bytes.extend(kind.to_le_bytes());
        value(&mut self.bytes);
        self.count += 1;
    }

    /// A value in its encoding, type in front.
    pub fn raw(&mut self, key: &str, value: &[u8]) {
        string(&mut self.bytes, key);
        self.bytes.extend(value);
        self.count += 1;
    }

    pub fn uint(&mut self, key: &str, value: u32) {
        self.put(key, 4, |out| out.extend(value.to_le_bytes()));
    }

    pub fn float(&mut self, key: &str, value: f64) {
        self.put(key, 6, |out| out.extend((value as f32).to_le_bytes()));
    }

    pub fn flag(&mut self, key: &str, value: bool) {
        self.put(key, 7, |out| out.push(value.into()));
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.put(key, 8, |out| string(out, value));
    }

    pub fn texts(&mut self, key: &str, values: &[String]) {
        self.put(key, 9, |out| {
            out.extend(8u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            values.iter().for_each(|v| string(out, v));
        });
    }

    pub fn ints(&mut self, key: &str, values: &[i32]) {
        self.put(key, 9, |out| {
            out.extend(5u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        });
    }

    pub fn floats(&mut self, key: &str, values: &[f32]) {
        self.put(key, 9, |out| {
            out.extend(6u32.to_le_bytes());
            out.extend((values.len() as u64).to_le_bytes());
            out.extend(values.iter().flat_map(|v| v.to_le_bytes()));
        });
    }

    /// Where the last pair ends in a file that they are written to.
    pub fn end(&self) -> u64 {
        // The magic number, the version, and the numbers of tensors and pairs are in front.
        4 + 4 + 8 + 8 + self.bytes.len() as u64
    }

    /// Adds all of others.
    pub fn append(&mut self, others: Pairs) {
        self.bytes.extend(others.bytes);
        self.count += others.count;
    }

    /// The number of pairs, and all of them.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.count.to_le_bytes());
        out.extend(&self.bytes);
    }
}
