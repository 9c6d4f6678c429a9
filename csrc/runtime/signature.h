// Whether a message was signed by the owner of an Ed25519 key.
#ifndef FUSEWRIGHT_RUNTIME_SIGNATURE_H
#define FUSEWRIGHT_RUNTIME_SIGNATURE_H

#include "file.h"

namespace fw {

// signature: 64 bytes; key: the 32 bytes of the public key.
bool is_signed(Bytes message, const uint8_t *signature, const uint8_t *key);

}  // namespace fw
#endif
