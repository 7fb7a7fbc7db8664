//! Letters of 5 x 8 dots, the last row for what hangs below the line.

/// Dots from one letter to the next, the gap counted.
pub const ADVANCE: usize = 6;
/// Dots of a line of text.
pub const HEIGHT: usize = 8;

/// The rows of a character, top first; in each the 5 low bits, left first. What is not ASCII is a box.
pub fn glyph(c: char) -> [u8; HEIGHT] {
    let index = (c as usize).checked_sub(' ' as usize);
    index.and_then(|i| GLYPHS.get(i)).copied().unwrap_or(0x1f11_1111_1111_1f00).to_be_bytes()
}

/// From the space to `~`, one byte a row.
#[rustfmt::skip]
const GLYPHS: [u64; 95] = [
    0x00000000_00000000, 0x04040404_04000400, 0x0a0a0a00_00000000, 0x0a0a1f0a_1f0a0a00, // space ! " #
    0x040f140e_051e0400, 0x18190204_08130300, 0x0c121408_15120d00, 0x04040800_00000000, // $ % & '
    0x02040808_08040200, 0x08040202_02040800, 0x0004150e_15040000, 0x0004041f_04040000, // ( ) * +
    0x00000000_000c0408, 0x0000001f_00000000, 0x00000000_000c0c00, 0x01010204_08101000, // , - . /
    0x0e111315_19110e00, 0x040c0404_04040e00, 0x0e110102_04081f00, 0x1f020402_01110e00, // 0 1 2 3
    0x02060a12_1f020200, 0x1f101e01_01110e00, 0x0608101e_11110e00, 0x1f010204_08080800, // 4 5 6 7
    0x0e11110e_11110e00, 0x0e11110f_01020c00, 0x000c0c00_0c0c0000, 0x000c0c00_0c040800, // 8 9 : ;
    0x02040810_08040200, 0x00001f00_1f000000, 0x08040201_02040800, 0x0e110102_04000400, // < = > ?
    0x0e11010d_15150e00, 0x0e11111f_11111100, 0x1e11111e_11111e00, 0x0e111010_10110e00, // @ A B C
    0x1c121111_11121c00, 0x1f10101e_10101f00, 0x1f10101e_10101000, 0x0e111017_11110f00, // D E F G
    0x1111111f_11111100, 0x0e040404_04040e00, 0x07020202_02120c00, 0x11121418_14121100, // H I J K
    0x10101010_10101f00, 0x111b1515_11111100, 0x11111915_13111100, 0x0e111111_11110e00, // L M N O
    0x1e11111e_10101000, 0x0e111111_15120d00, 0x1e11111e_14121100, 0x0f10100e_01011e00, // P Q R S
    0x1f040404_04040400, 0x11111111_11110e00, 0x11111111_110a0400, 0x11111115_15150a00, // T U V W
    0x11110a04_0a111100, 0x1111110a_04040400, 0x1f010204_08101f00, 0x0e080808_08080e00, // X Y Z [
    0x10100804_02010100, 0x0e020202_02020e00, 0x040a1100_00000000, 0x00000000_00001f00, // backslash ] ^ _
    0x08040200_00000000, 0x00000e01_0f110f00, 0x10101619_11111e00, 0x00000e10_10110e00, // ` a b c
    0x01010d13_11110f00, 0x00000e11_1f100e00, 0x0609081c_08080800, 0x00000f11_110f010e, // d e f g
    0x10101619_11111100, 0x04000c04_04040e00, 0x02000602_0202120c, 0x10101214_18141200, // h i j k
    0x0c040404_04040e00, 0x00001a15_15111100, 0x00001619_11111100, 0x00000e11_11110e00, // l m n o
    0x00001e11_111e1010, 0x00000f11_110f0101, 0x00001619_10101000, 0x00000f10_0e011e00, // p q r s
    0x08081c08_08090600, 0x00001111_11130d00, 0x00001111_110a0400, 0x00001111_15150a00, // t u v w
    0x0000110a_040a1100, 0x00001111_110f010e, 0x00001f02_04081f00, 0x02040408_04040200, // x y z {
    0x04040404_04040400, 0x08040402_04040800, 0x00000815_02000000, // | } ~
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn characters_differ_and_fit() {
        let glyphs: BTreeSet<_> = (' '..='~').map(glyph).collect();
        assert_eq!(glyphs.len(), 95);
        assert!(glyphs.iter().flatten().all(|row| row >> 5 == 0));
        assert_eq!(glyph(' '), [0; HEIGHT]);
        assert_eq!(glyph('T')[..2], [0b11111, 0b00100]);
        assert!(!glyphs.contains(&glyph('é')) && glyph('é') == glyph('\n'));
    }
}
